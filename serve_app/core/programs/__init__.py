"""Agent programs: recognition, residency in the KV caches of replicas, and the order among programs.

`recognition` finds the conversation and the program of a request. `residency` models which contexts the
replicas have cached, and how much room there is for another one. `gaps` learns how soon a conversation
returns. `order` selects the next program that becomes resident. `capacity` learns the size of a KV cache that
is not reported. `program_scheduler` applies these rules to the scheduler's events.
"""
