"""Where keys and values live between the steps of a generation."""
