from experiments.common.vllm_server import EngineCounters, VllmServerSettings, read_counters

METRICS = """\
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 40.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 900.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 2.0
vllm:iteration_tokens_total_sum{engine="1",model_name="m"} 1e+02
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 5.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.25
"""


def test_counters_are_summed_over_engine_cores() -> None:
    assert read_counters(METRICS) == EngineCounters(
        steps=42, step_tokens=1_000, started=5, queue_wait_s=0.25, preemptions=0
    )


def test_what_was_counted_in_between_is_the_difference() -> None:
    before = EngineCounters(steps=40, step_tokens=1_000, started=1, queue_wait_s=0.25, preemptions=0)
    between = read_counters(METRICS).since(before)
    assert between == EngineCounters(steps=2, step_tokens=0, started=4, queue_wait_s=0, preemptions=0)


def test_options_reach_vllm_in_its_own_spelling() -> None:
    settings = VllmServerSettings(
        model="folder",
        served_model_names=("one", "two"),
        options={
            "max_num_seqs": 32,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "hf_overrides": '{"num_hidden_layers": 6}',
        },
        environment={},
    )
    command = settings.command(8_100)
    assert command[1:] == [
        *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "8100"),
        *("--model", "folder", "--served-model-name", "one", "two", "--max-num-seqs", "32"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--hf-overrides", '{"num_hidden_layers": 6}'),
    ]
