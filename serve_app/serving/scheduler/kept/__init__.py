"""Sums that outlive the scheduler that counts them: `usage` of keys, for bills, and `costs`, who pays."""
