"""Training recipes (YAML) and draft shapes (JSON), installed as package data."""
