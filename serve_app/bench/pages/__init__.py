"""The reports of `bench --report`: of one endpoint, and of two that are compared."""
