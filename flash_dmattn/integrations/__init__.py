"""Integrations with other libraries. Each module except `triangle` and `windows` imports the library of its name."""
