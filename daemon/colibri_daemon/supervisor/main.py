"""The supervisor process: `colibrid serve`."""

from __future__ import annotations

import os

from ..common import log, process
from ..common.exit_codes import Exit
from ..common.settings import Settings
from . import sockets
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
    with Recorder(HANDLERS) as signals:  # from here on a signal leaves nothing behind
        try:
            listener = sockets.listen(settings.socket, settings.socket_mode, settings.socket_group, os.environ)
        except sockets.SocketError as e:
            logger.error("the socket cannot be used", error=str(e))
            return Exit.SOCKET
        try:
            admin = sockets.bind(settings.admin_path, ADMIN_MODE)
        except sockets.SocketError as e:
            logger.error("the admin socket cannot be used", error=str(e))
            listener.remove()
            return Exit.SOCKET
        try:
            logger.info("starting", model=str(settings.model), socket=str(listener.path), workers=settings.workers)
            return Supervisor(settings, listener, admin, Notifier(os.environ), Roles()).run(signals)
        except Exception:
            logger.exception("uncaught exception, the service ends")  # what still runs dies with this process
            return Exit.INTERNAL
        finally:
            for made in (listener, admin):
                made.remove()
                made.close()
