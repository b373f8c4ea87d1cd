"""Before, during and after a run on a cluster: who differs, who is late, who is missing."""
