"""Device code and its launchers. Each family's `__init__` is its menu; implementations never import each other."""
