from collections.abc import Iterator

import pytest

from tests.serving.state.bucket import Bucket, served_bucket


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """Yield a bucket on an S3-compatible server."""
    with served_bucket(tmp_path_factory.mktemp("bucket")) as served:
        yield served
