"""The supervisor process: `colibrid serve`."""

from __future__ import annotations

import os
from contextlib import ExitStack

from ..common import log, process
from ..common.exit_codes import Exit
from ..common.settings import Settings
from . import sockets
from .fdstore import ADMIN, CLIENTS, FdStore, PassedError, passed
from .loop import HANDLERS, Supervisor
from .notify import Notifier
from .roles import Roles
from .signals import Recorder

ADMIN_MODE = 0o600


def serve(settings: Settings) -> int:
    """Runs the daemon in the foreground until it is asked to stop or cannot go on; returns its exit code.

    Called from the main thread of a process that has no other: it forks, and it installs signal handlers.
    """
    process.open_stdio()
    process.set_title("supervisor")
    log.setup("supervisor", settings)
    logger = log.get("supervisor")
    for warning in settings.warnings:
        logger.warning("configuration", warning=warning)
    with Recorder(HANDLERS) as signals, ExitStack() as made:  # from here on a signal leaves nothing behind
        notifier = Notifier(os.environ)
        try:
            given = passed(os.environ)
            store = FdStore(notifier, given)
            listeners = _listen(settings, store, given, made)
        except (sockets.SocketError, PassedError) as e:
            logger.error("the socket cannot be used", error=str(e))
            return Exit.SOCKET
        return _run(settings, listeners, notifier, store, signals)


def _listen(settings: Settings, store: FdStore, given: list[tuple[str, int]],
            made: ExitStack) -> tuple[sockets.Listener, sockets.Listener, sockets.Listener | None]:  # fmt: skip
    """For clients, for administrators, for metrics if they are wanted. They go when made is closed."""

    def keep(listener: sockets.Listener) -> sockets.Listener:
        made.callback(listener.close)
        made.callback(listener.remove)
        return listener

    mode, group = settings.socket_mode, settings.socket_group
    clients = keep(sockets.listen(settings.socket, mode, group, store, CLIENTS, given))
    admin = keep(sockets.listen(settings.admin_path, ADMIN_MODE, None, store, ADMIN))
    return clients, admin, keep(sockets.listen_http(settings.metrics, mode, group)) if settings.metrics else None


def _run(settings: Settings, listeners: tuple[sockets.Listener, sockets.Listener, sockets.Listener | None],
         notifier: Notifier, store: FdStore, signals: Recorder) -> int:  # fmt: skip
    clients, admin, metrics = listeners
    logger = log.get("supervisor")
    logger.info("starting", model=str(settings.model), socket=str(clients.path), workers=settings.workers,
                metrics=settings.metrics)
    try:
        return Supervisor(settings, clients, admin, notifier, Roles(), metrics, store).run(signals)
    except Exception:
        logger.exception("uncaught exception, the service ends")  # what still runs dies with this process
        return Exit.INTERNAL
