"""The course as a web site: `./run_all.sh book`."""
