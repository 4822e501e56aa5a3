"""Operator actions for the metrics reference: one line for each metric of the application."""

METRIC_ADVICE = {
    # Gateways
    "ewsjf_gateway_e2e_seconds": "The difference to the time to first token is the time of the generation.",
    "ewsjf_gateway_slo_attained_requests_total": (
        "Divided by `ewsjf_gateway_slo_requests_total`: the SLO attainment. If it falls, compare the kinds "
        "of `ewsjf_gateway_slo_violations_total`."
    ),
    "ewsjf_gateway_slo_requests_total": "Denominator of the SLO attainment.",
    "ewsjf_gateway_held_body_bytes": (
        "Near `max_held_body_bytes`, large requests are rejected with 503. Raise it, or add gateways."
    ),
    "ewsjf_gateway_in_flight_requests": (
        "Compare the gateways: uneven numbers mean that few clients use long-lived connections."
    ),
    "ewsjf_gateway_inter_token_latency_seconds": (
        "A long tail with a good mean: preemptions, or long prefills next to decodes. Check the engines' "
        "preemptions and prefill isolation."
    ),
    "ewsjf_gateway_ignored_headers_total": (
        "Clients send headers for another gateway that have no effect here: an `objective` that is not "
        "configured, a fairness id that is no tenant's name, or values that their key does not allow."
    ),
    "ewsjf_gateway_fallbacks_total": (
        "`reason` is the outcome at `model`. Many with `rejected_queue_full`: the model needs more capacity."
    ),
    "ewsjf_gateway_put_backs_total": (
        "`lost`: engines die. `busy`: engines have less capacity than they report. `unreachable`: the "
        "network or a node. `revoked`: batch requests gave way, which is normal."
    ),
    "ewsjf_gateway_queue_wait_seconds": (
        "High in one class: the class's share or the capacity is too small. `ewsjf_blocked_heads` shows the "
        "causes."
    ),
    "ewsjf_gateway_requests_total": (
        "Rising `rejected_queue_full` or `expired`: add replicas, or reduce traffic. Rising `failed`: see "
        "the log lines with `outcome=failed`."
    ),
    "ewsjf_gateway_slo_violations_total": (
        "`ttft`: queue or prefill. `tpot`: overloaded engines. `rejected`, `expired`: capacity. `failed`: "
        "engines. `abandoned`: clients disconnected."
    ),
    "ewsjf_gateway_time_per_output_token_seconds": (
        "Too high: reduce the concurrency of the engines, or set `backpressure.tpot_gate_s`."
    ),
    "ewsjf_gateway_time_to_first_token_seconds": (
        "Subtract the queue time: the rest is prefill in the engine. A long queue time needs capacity."
    ),
    "ewsjf_gateway_tokens_total": "The rate is the throughput. Compare it with the plan.",
    "ewsjf_gateway_upstream_connects_total": (
        "As many as requests: engines or a proxy close the connection after each answer."
    ),
    "ewsjf_gateway_upstream_stale_retries_total": (
        "More than a few: set the engines' keep-alive above the gateway's `idle_expiry_s`."
    ),
    "ewsjf_overhead_seconds": (
        "Milliseconds in `parse` or `schedule`: a gateway or its node lacks CPU. Milliseconds in `decide`: "
        "very many tenants or adapters are queued."
    ),
    "ewsjf_build_info": "Two versions for long: an upgrade is stuck.",
    "ewsjf_process_cpu_seconds_total": (
        "A gateway near one core: add gateways. A scheduler near one core: split the model's traffic over "
        "two applications."
    ),
    "ewsjf_process_resident_memory_bytes": (
        "Unbounded growth is a bug of this project. Bodies are in `ewsjf_gateway_held_body_bytes`."
    ),
    "ewsjf_process_start_time_seconds": (
        "Recent without a deployment: the process died. The log before it shows the reason."
    ),
    # Scheduler
    "ewsjf_b_short_tokens": "Check `ewsjf_misroutes_total` before you set it by hand.",
    "ewsjf_blocked_heads": (
        "`kv_cache`, `engines_busy`: add replicas. `no_replica`: no engine is available. `long_prefill`: "
        "long prefills wait for each other. `particular_replica`: only one replica has the adapter or stored "
        "response. `engine_queue`: expected for batch work."
    ),
    "ewsjf_dispatches_total": "Rate below the arrival rate: the queue grows.",
    "ewsjf_estimate_ratio": (
        "Far from 1 for long: a kind of text that is not learned yet, or clients without `max_tokens`."
    ),
    "ewsjf_gateways_connected": "Fewer than started: look for `event=scheduler_unreachable`.",
    "ewsjf_length_queue_oldest_wait_seconds": (
        "Near the bound of its class on waits: only promotion serves this queue. Add capacity."
    ),
    "ewsjf_length_queue_requests_waiting": "Only one queue grows: few replicas can serve its lengths.",
    "ewsjf_length_queue_wait_seconds": (
        "Short queues wait as long as long ones: check the partition's age and `ewsjf_misroutes_total`."
    ),
    "ewsjf_length_queues": "0 for hours under traffic: the tuner does not run, or has too few samples.",
    "ewsjf_misroutes_total": (
        "Many `long`: output lengths are underestimated, or `b_short_tokens` is too high. Many `short` use "
        "capacity of the long pool: `b_short_tokens` is too low."
    ),
    "ewsjf_latency_targets_total": (
        "`missed` over `met` and `missed`: add replicas, or let requests be refused. `refused`: the targets "
        "exceed the capacity, or `refuse_above` is too low."
    ),
    "ewsjf_longest_gap_seconds": (
        "By cause. `prefill`: smaller chunks of long prefills in the engine, or a TPOT target, keep streams "
        "even. `kv_cache`: the engine preempts and needs a larger cache. `other`: the engine or the network."
    ),
    "ewsjf_prefix_cached_tokens_total": (
        "By kind, `predicted` against `reported`: far apart, the prefix index is wrong; `ewsjf status` says "
        "in which direction. No series: no engine reports cached tokens."
    ),
    "ewsjf_prefix_prediction_error_ratio": (
        "Above 0, engines had forgotten what the index expected; below 0, they had more."
    ),
    "ewsjf_queued_bytes": "Prompts that gateways hold for queued requests, in the classes' shares.",
    "ewsjf_queued_tokens": "Divided by `ewsjf_queue_drain_tokens_per_second`: the time to serve the queue.",
    "ewsjf_partition_age_seconds": (
        "Old although the traffic changed: look for `event=tuner_scheduler_unreachable`."
    ),
    "ewsjf_partition_changes_total": (
        "Many per hour: the traffic oscillates. Learn from longer windows (`tuner.advanced.learn_from`)."
    ),
    "ewsjf_pool_capacity_ratio": "Near 1: batches are full. Scale the pool up.",
    "ewsjf_pool_kv_reserved_ratio": (
        "Near 1 with batches that are not full: KV cache is the limit. Use more memory or a shorter context."
    ),
    "ewsjf_pool_replicas": (
        "`stale`: no reports. `suspended`: failing engines. `draining` for long: answers that do not end."
    ),
    "ewsjf_pool_saturation_ratio": "1 for minutes: the pool is the bottleneck.",
    "ewsjf_put_backs_total": "As `ewsjf_gateway_put_backs_total`, counted by the scheduler.",
    "ewsjf_queue_drain_tokens_per_second": (
        "Basis of `Retry-After`. Below the plan: the engines are slower than expected."
    ),
    "ewsjf_queue_estimate_error_seconds": (
        "Wide compared with queue times: the estimates sent to clients are of little use. They improve as "
        "bursts repeat."
    ),
    "ewsjf_queue_estimates_total": (
        "About 0.8 of the `first` estimates should be `inside`. Many `after`: bursts last longer than "
        "earlier ones."
    ),
    "ewsjf_queue_wait_cause_seconds_total": (
        "The largest cause shows the remedy. `engines_busy`: more replicas. `kv_cache`: larger ones. "
        "`other_tenants`: weights. `own_requests`: only a slower client."
    ),
    "ewsjf_queue_wait_mispredictions_total": (
        "Each is a 504 instead of an early 429. Many in an overload that lasts: raise the queue timeouts, or "
        "add replicas."
    ),
    "ewsjf_queue_wait_prediction_error_absolute_mean_seconds": (
        "Large compared with queue times: deadline rejections are inaccurate. It settles within minutes "
        "after a change of replicas."
    ),
    "ewsjf_queue_wait_prediction_error_mean_seconds": (
        "Above 0 for long: clients are rejected that would have been served in time."
    ),
    "ewsjf_queue_wait_prediction_error_ratio": (
        "Above 0.5 for minutes: early rejections and the expected times of a class are inaccurate, and "
        "`ewsjf status` has a finding with the means."
    ),
    "ewsjf_queue_wait_prediction_error_seconds": "The spread is the accuracy of deadline rejections.",
    "ewsjf_queue_wait_seconds": "Only one pool waits: add replicas there, or allow spilling.",
    "ewsjf_replica_kv_usage_ratio": "One replica far above the others: prefix affinity, or one long request.",
    "ewsjf_replica_waiting": (
        "Above the target of backpressure: another client sends requests to the engine directly."
    ),
    "ewsjf_endpoints": "`down` above 0: see the alert `EndpointDown`.",
    "ewsjf_replicas_stale": "Above 0: see the alert `StaleReplicas`.",
    "ewsjf_requests_concluded_total": (
        "As `ewsjf_gateway_requests_total`, without requests that never reached the scheduler."
    ),
    "ewsjf_requests_in_flight": "Uneven within a pool: engines of different speed or size.",
    "ewsjf_requests_waiting": (
        "Growing in all classes: capacity is too small. Growing in one class: its share is too small."
    ),
    "ewsjf_program_forced_turns_total": (
        "Rising: programs wait longer than their starvation bound. Add KV cache or replicas."
    ),
    "ewsjf_program_known": "Programs of the last hours, most of them in a gap.",
    "ewsjf_program_moves_total": "Rising: replicas with cached contexts are busy or were lost.",
    "ewsjf_program_saved_tokens_total": "Its rate is the prefill that the engines did not compute again.",
    "ewsjf_program_turns_total": "Turns of agents, out of all requests.",
    "ewsjf_program_turns_waiting": "Always above zero: the contexts of all programs exceed the KV caches.",
    "ewsjf_retry_reservations": "Many: rejected clients honour `Retry-After`, and are served first.",
    "ewsjf_retunings_total": "Compare steps in latency with these times.",
    "ewsjf_observer_errors_total": (
        "Above 0: a bug. What `observer` records is incomplete, and scheduling continues. Report the "
        "traceback after `event=observer_failed` in the scheduler's log."
    ),
    "ewsjf_scheduler_errors_total": "Any: see the alert `SchedulerFault`.",
    "ewsjf_scheduler_incarnation": "Rising without a deployment: see the alert `SchedulerRestarts`.",
    "ewsjf_spills_total": "Many for long: the sizes of the pools do not match the traffic.",
    "ewsjf_stale_reports_total": "Often for one replica: its event loop is blocked.",
    "ewsjf_tenant_engine_seconds_total": (
        "Engine usage by tenant, for charging; see [operations](../operations.md)."
    ),
    "ewsjf_tenant_imposed_delay_seconds_total": (
        "Much for one tenant: it delays others. Lower the `weight` of its key, or its class."
    ),
    "ewsjf_tenant_lead_ratio": ("Near 1: one tenant got almost all service. Set weights and limits of keys."),
    "ewsjf_tenant_requests_total": "Traffic by tenant: shows which one causes a rise in load.",
    "ewsjf_tenant_requests_waiting": "Only one tenant: it exceeds its share and delays only itself.",
    "ewsjf_tenant_tokens_total": "Shares of the throughput, for charging or for the `weight` of keys.",
    "ewsjf_tuned_value": "Compare with the configuration file; adopted values can be copied there.",
    "ewsjf_tuner_decisions_total": (
        "Only `rolled_back` for days, never `adopted`: the values are already good, or the twin is wrong."
    ),
    "ewsjf_tuner_frozen": "1: no trials until it is thawed. `/debug/status` shows the reason.",
    "ewsjf_tuner_searches_total": "0 under traffic: the twin is not accurate enough for a search.",
    "ewsjf_tuner_candidates_total": "The rate shows the tuner's CPU usage.",
    "ewsjf_twin_error_ratio": ("Beyond ±0.5: do not trust the tuner's results; see the alert `TwinError`."),
    # Autoscaling
    "ewsjf_desired_replicas": (
        "Above the running replicas for long: no free GPUs, or engines that do not start."
    ),
    "ewsjf_pool_backlog_seconds": "High with free GPUs: raise `max_replicas`.",
    "ewsjf_pool_load_engines": "Above the number of running replicas: the queue grows.",
    "ewsjf_scaling_decisions_total": "Up and down in turn: raise `downscale_delay_s`.",
    "ewsjf_scaling_failures_total": "Any: see the alert `ScalingFails`.",
    # Usage
    "ewsjf_key_requests_total": "Requests of each key, for charging.",
    "ewsjf_key_tokens_total": "Tokens of each key, for charging; `GET /debug/usage` has days.",
    # Learned state
    "ewsjf_state_failures_total": "Any: `event=state_unreachable` has the path and the error.",
    "ewsjf_state_saved_timestamp_seconds": "More than 15 minutes ago: see the alert `StateNotSaved`.",
}
