from tests.e2e.conftest import app

__all__ = ["app"]
