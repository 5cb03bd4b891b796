"""The load generator: a scenario drives a server and what it saw is reported.

scenario.py says what is asked for, lengths.py and arrivals.py how long and when, requests.py makes the requests,
runner.py sends them over a transport (over_socket.py, over_http.py), figures.py counts, report.py and page.py show,
baseline.py compares ratios. All times are seconds of time.monotonic().
"""
