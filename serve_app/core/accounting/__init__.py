"""Accounting: explains waits, attributes engine time to tenants and takes snapshots of the queue."""
