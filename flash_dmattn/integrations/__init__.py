"""Integrations with other libraries. Each module except `triangle` imports the library that it is named after."""
