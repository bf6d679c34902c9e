"""What a machine, a call or a model is, in figures."""
