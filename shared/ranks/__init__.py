"""Processes that work together: process groups, forked ranks, torchrun, supervision, slow links."""
