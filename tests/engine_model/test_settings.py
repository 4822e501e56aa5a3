import pytest

from tests.engine_model.builders import settings


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"kv_tokens": 100, "max_model_len": 128}, "max_model_len \\(128\\) does not fit"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 256}, "raise the first or lower the second"),
        ({"long_prefill_token_threshold": -1}, "got -1"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_remedy(values: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        settings(**values)


def test_the_cache_is_rounded_down_to_whole_blocks() -> None:
    assert settings(kv_tokens=4_127, block_size=16).kv_blocks == 257
