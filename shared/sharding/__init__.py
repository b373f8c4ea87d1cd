"""ZeRO and full sharding by hand: one flat shard, one set of hooks, two faces."""
