"""What to do when a metric stands out: one line for each of the application's metrics, for the reference."""

METRIC_ADVICE = {
    # Gateways
    "ewsjf_gateway_e2e_seconds": "Compare with the time to first token: what is left is generation.",
    "ewsjf_gateway_good_requests_total": (
        "Falling against `ewsjf_gateway_judged_requests_total`: look at the kinds of "
        "`ewsjf_gateway_slo_violations_total`."
    ),
    "ewsjf_gateway_judged_requests_total": "What the former is a share of: the SLO attainment.",
    "ewsjf_gateway_held_body_bytes": (
        "Near `max_held_body_bytes` large requests are rejected with 503: raise it, or add gateways."
    ),
    "ewsjf_gateway_in_flight_requests": (
        "Divide by the number of gateways; uneven numbers mean long-lived connections of few clients."
    ),
    "ewsjf_gateway_inter_token_latency_seconds": (
        "A long tail with a good mean: preemptions, or long prefills beside decodes. Look at the "
        "engines' preemptions and at isolation."
    ),
    "ewsjf_gateway_put_backs_total": (
        "`lost` means dying engines, `busy` engines that are smaller than they say, `unreachable` a "
        "network or a node."
    ),
    "ewsjf_gateway_queue_wait_seconds": (
        "High in one class: its share is too small, or capacity is. The causes are in `ewsjf_blocked_heads`."
    ),
    "ewsjf_gateway_requests_total": (
        "Rising `rejected_queue_full` or `expired`: more replicas, or less traffic. Rising `failed`: "
        "the log lines with `outcome=failed`."
    ),
    "ewsjf_gateway_slo_violations_total": (
        "`ttft`: queue or prefill; `tpot`: engines are too full; `rejected` and `expired`: capacity; "
        "`failed`: engines; `abandoned`: clients gave up."
    ),
    "ewsjf_gateway_time_per_output_token_seconds": (
        "Too high: lower what engines run at once, or set `backpressure.tpot_gate_s`."
    ),
    "ewsjf_gateway_time_to_first_token_seconds": (
        "Subtract the queue wait: a queue needs capacity, the rest is prefill in the engine."
    ),
    "ewsjf_gateway_tokens_total": "The rate is the throughput; compare with what was planned.",
    "ewsjf_gateway_upstream_connects_total": (
        "As many as requests: engines or a proxy close connections after each answer."
    ),
    "ewsjf_gateway_upstream_stale_retries_total": (
        "More than a few: set the engines' keep-alive above the gateway's `idle_expiry_s`."
    ),
    "ewsjf_overhead_seconds": (
        "Milliseconds in `parse` or `schedule`: a gateway or the node lacks CPU. In `decide`: a queue "
        "of very many tenants or adapters."
    ),
    "ewsjf_build_info": "Two versions for long: an upgrade got stuck.",
    "ewsjf_process_cpu_seconds_total": (
        "A gateway near one core: add gateways. A scheduler near one core: split the model's traffic "
        "over two applications."
    ),
    "ewsjf_process_resident_memory_bytes": (
        "Growth without end is a fault of this project; bodies are in `ewsjf_gateway_held_body_bytes`."
    ),
    "ewsjf_process_start_time_seconds": "Recent and not deployed: the process died; the log before says why.",
    # Scheduler
    "ewsjf_b_short_moves_total": "Many in an hour: the traffic swings around the border; see routing.",
    "ewsjf_b_short_tokens": "Compare with `ewsjf_misroutes_total` before you fix it by hand.",
    "ewsjf_blocked_heads": (
        "`kv_cache` and `engines_busy`: more replicas; `no_replica`: engines are missing; `long_prefill`: "
        "long prefills wait for each other; `particular_replica`: an adapter or a stored response is there "
        "alone; `engine_queue`: batch work waits, as it should."
    ),
    "ewsjf_dispatches_total": "Its rate against arrivals: below them, the queue grows.",
    "ewsjf_estimate_ratio": (
        "Far from 1 for long: prompts of a kind that has not been learned, or clients without `max_tokens`."
    ),
    "ewsjf_gateways_connected": "Fewer than were started: look for `event=scheduler_unreachable`.",
    "ewsjf_length_queue_oldest_wait_seconds": (
        "Near the class's `max_wait_s`: that queue is served by promotion alone, so capacity is missing."
    ),
    "ewsjf_length_queue_requests_waiting": "One queue grows alone: its lengths fit few replicas now.",
    "ewsjf_length_queue_wait_seconds": (
        "Short queues that wait like long ones: look at the partition's age and at `ewsjf_misroutes_total`."
    ),
    "ewsjf_length_queues": "0 for hours with traffic: the tuner does not run, or has seen too little.",
    "ewsjf_misroutes_total": (
        "Many `long`: output lengths are underestimated, or `b_short_tokens` is too high. Many `short` "
        "cost room in the long pool: it is too low."
    ),
    "ewsjf_partition_age_seconds": (
        "Old while the traffic has changed: look for `event=tuner_without_scheduler`."
    ),
    "ewsjf_partition_changes_total": (
        "Many in an hour: the traffic swings; queues are learned from longer windows by "
        "`tuner.advanced.learn_from`."
    ),
    "ewsjf_pool_capacity_ratio": "Near 1: batches are full; requests wait for places. Scale the pool up.",
    "ewsjf_pool_kv_reserved_ratio": (
        "Near 1 while batches are not full: KV cache is the limit. Use more memory or a shorter context."
    ),
    "ewsjf_pool_replicas": (
        "`stale`: no reports; `suspended`: failing engines; `draining` for long: answers that do not end."
    ),
    "ewsjf_pool_saturation_ratio": "1 for minutes: the pool is the bottleneck.",
    "ewsjf_put_backs_total": "As `ewsjf_gateway_put_backs_total`, as the scheduler saw them.",
    "ewsjf_queue_drain_tokens_per_second": "`Retry-After` rests on it; below the plan, engines are slow.",
    "ewsjf_queue_estimate_error_seconds": (
        "Wide compared with the waits: the estimates are imprecise; they improve as bursts repeat."
    ),
    "ewsjf_queue_estimates_total": (
        "`inside` should be about 0.8 of the `first` ones. Many `after`: bursts are longer than those before."
    ),
    "ewsjf_queue_wait_cause_seconds_total": (
        "Its largest cause says what would help: `engines_busy` replicas, `kv_cache` larger ones, "
        "`other_tenants` weights, `own_requests` nothing but a slower client."
    ),
    "ewsjf_queue_wait_prediction_error_absolute_mean_seconds": (
        "Large against the waits: deadlines reject too much or too little; it settles within minutes "
        "after a change of replicas."
    ),
    "ewsjf_queue_wait_prediction_error_mean_seconds": (
        "Above 0 for long: clients are rejected that would have been served in time."
    ),
    "ewsjf_queue_wait_prediction_error_seconds": "Its spread says how far a deadline can be trusted.",
    "ewsjf_queue_wait_seconds": "By pool: the one that waits needs replicas, or spilling.",
    "ewsjf_replica_kv_usage_ratio": "One replica far above the others: prefix affinity, or one long request.",
    "ewsjf_replica_waiting": "Above the target of backpressure: somebody else sends requests there, too.",
    "ewsjf_replicas_stale": "Above 0: see the alert `StaleReplicas`.",
    "ewsjf_requests_concluded_total": "As `ewsjf_gateway_requests_total`, without what no scheduler saw.",
    "ewsjf_requests_in_flight": "Uneven within a pool: engines of different speed or size.",
    "ewsjf_requests_waiting": "Growing in all classes: capacity; in one alone: its share.",
    "ewsjf_retry_reservations": "Many: clients come back as told, and will be served first.",
    "ewsjf_retunings_total": "Compare steps in latency with these times.",
    "ewsjf_scheduler_errors_total": "Any: see the alert `SchedulerFault`.",
    "ewsjf_scheduler_incarnation": "Rising by itself: see the alert `SchedulerRestarts`.",
    "ewsjf_spills_total": "Many for long: the pools' sizes do not match the traffic.",
    "ewsjf_stale_reports_total": "Often for one replica: its event loop is blocked.",
    "ewsjf_tenant_engine_seconds_total": (
        "Who used the engines, for charging; see who pays in the document of operations."
    ),
    "ewsjf_tenant_imposed_delay_seconds_total": (
        "Much for one tenant: others wait for it; a smaller `weight` of its key, or another class."
    ),
    "ewsjf_tenant_lead_ratio": (
        "Near 1 for one tenant: it had nearly all service; weights and limits of keys change that."
    ),
    "ewsjf_tenant_requests_total": "Who causes the load; a tenant that doubles is worth a call.",
    "ewsjf_tenant_requests_waiting": "One tenant alone: it sends more than its share, and waits for itself.",
    "ewsjf_tenant_tokens_total": "Shares of the throughput, for charging or for `weight` of keys.",
    "ewsjf_tuned_value": "Compare with the file: what the tuner adopted can be written there.",
    "ewsjf_tuner_decisions_total": (
        "`rolled_back` without `adopted` for days: the values are good, or the twin is wrong."
    ),
    "ewsjf_tuner_frozen": "1: nothing is tried until it is thawed; `/debug/status` says why.",
    "ewsjf_tuner_searches_total": "0 with traffic: the twin is not accurate enough to search in.",
    "ewsjf_tuner_trials_total": "Its rate is the tuner's use of CPU.",
    "ewsjf_twin_error_ratio": (
        "Beyond 0.5 either way: what the tuner finds is not to be trusted; see the alert `TwinError`."
    ),
    # Autoscaling
    "ewsjf_desired_replicas": (
        "Above the replicas that there are for long: no free GPUs, or engines that do not start."
    ),
    "ewsjf_pool_backlog_seconds": (
        "Seconds until one engine has worked it off; many with spare GPUs: raise `max_replicas`."
    ),
    "ewsjf_pool_load_engines": "Above the replicas that there are: the queue grows.",
    "ewsjf_scaling_decisions_total": "Up and down in turn: raise `downscale_delay_s`.",
    "ewsjf_scaling_failures_total": "Any: see the alert `ScalingFails`.",
    # Usage
    "ewsjf_key_requests_total": "Requests of each key, for charging.",
    "ewsjf_key_tokens_total": "Tokens of each key, for charging; `GET /debug/usage` has days.",
    # Learned state
    "ewsjf_state_failures_total": "Any: `event=state_unreachable` says which path, and why.",
    "ewsjf_state_saved_timestamp_seconds": "A quarter of an hour ago: see the alert `StateNotSaved`.",
}
