"""flash_dmattn inside other libraries. Each module but `triangle` imports the library that it is named after."""
