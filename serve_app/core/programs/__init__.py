"""Agent programs: recognition, residency in the KV caches of replicas, and the order among programs.

`program` finds the conversation and the program of a request. `residency` models which contexts the replicas
have cached, how much room there is for another one, and how soon a conversation returns. `program_scheduler`
selects the next program that becomes resident, and applies these rules to the scheduler's events.
"""
