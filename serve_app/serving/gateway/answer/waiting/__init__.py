"""What a stream is sent while its request waits: comments against silence, and news of the queue."""
