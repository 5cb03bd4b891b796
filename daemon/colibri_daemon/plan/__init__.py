"""colibrid plan: what a machine can serve, before it does.

need.py says where memory goes, surroundings.py measures what the processes themselves take, probe.py times a slice of
the model on this machine, speed.py makes rates of that, advice.py says what does not fit, report.py prints it all.
"""
