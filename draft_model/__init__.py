"""The EAGLE-3 draft: its configuration, its module, its published checkpoint layout and how its name is resolved."""
