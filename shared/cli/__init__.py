"""The commands behind run_all.sh."""
