"""Steps that are tried and undone: to find a setting, or what a strategy would cost."""
