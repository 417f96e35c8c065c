"""flash_dmattn inside other libraries. A module here imports the library that it is named after; `triangle` needs none."""
