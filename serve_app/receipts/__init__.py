"""Commands that read what a running application remembers of its last requests: `explain` and `capture`."""
