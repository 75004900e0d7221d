"""The one registered buffer of a rank."""
