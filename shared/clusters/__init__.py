"""Before, in and after a run on a cluster: who is unlike the others, who is late, who is missing."""
