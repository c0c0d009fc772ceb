"""A plugin of pytest with a mistake, which `tests/test_workers.py` gives to its suite."""


def pytest_runtest_logstart() -> None:
    """Called in workers."""
    raise RuntimeError("a mistake of the plugin")
