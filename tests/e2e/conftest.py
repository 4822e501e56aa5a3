import pytest

from tests.e2e.served import Served, shared


@pytest.fixture
def app(request: pytest.FixtureRequest) -> Served:
    """Return the application once it is ready."""
    served = shared(request.config)
    served.wait_until_ready()
    return served
