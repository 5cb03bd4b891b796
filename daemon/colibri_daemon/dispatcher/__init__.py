"""The process between the clients' socket and the workers: admits, orders, assigns and relays requests."""
