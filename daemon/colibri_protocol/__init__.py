"""The client protocol of the Colibri daemon, sans I/O: messages, framing, connection state. No sockets, no clocks."""
