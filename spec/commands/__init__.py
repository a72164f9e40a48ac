"""The commands of `spec`, one file for each group. Heavy modules are imported inside the commands."""
