"""Tests of token estimates, pools and the ledger."""
