from tests.lab.conftest import load_1_is_measured_on_few_requests

__all__ = ["load_1_is_measured_on_few_requests"]
