"""What replicas share: in memory for one router, or in Redis."""
