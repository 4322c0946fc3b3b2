"""Listens with the client's own listener: listen.py CLIENT URL PASSWORD TOPIC SUBSCRIBER KIND

CLIENT is c8y_api or pyc8y. KIND is exclusive, shared, or member, which is shared and leaves the others their subscription.

Tells of each connection ("connected"), of each message as it comes ("message") and after it is acknowledged ("acked"). While it
is held, from SIGUSR1 on, it neither finishes a message nor takes the next. SIGTERM stops the listener, which unsubscribes.
"""

import asyncio
import signal
import sys
import time

from clients import c8y_api_client, pyc8y_client
from say import say


async def report_connections(listener):
    """The listener reconnects without telling anybody."""
    known = None
    while True:
        if listener._is_connected.is_set() and listener._connection is not known:
            known = listener._connection
            say("connected")
        await asyncio.sleep(0.02)


async def listen(make_listener):
    """Listens until SIGTERM; the listener acknowledges when it is told to."""
    stopped = asyncio.Event()
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, held.set)

    async def received(message):
        if held.is_set():
            say("held")
            await asyncio.Event().wait()
        say("message", ack=message.id, source=message.source, action=message.action, body=message.json)
        await message.ack()
        say("acked", ack=message.id, time=time.time())

    while not stopped.is_set():
        listener = make_listener()
        reports = asyncio.create_task(report_connections(listener))
        listening = listener.start(received)
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([listening, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listener.stop()
        try:
            await listening
        except OSError as error:
            # c8y_api gives up when it cannot ask for a token, as while the gateway restarts: its users start it again.
            print("the listener gave up:", error, file=sys.stderr)
            await asyncio.sleep(0.1)
        reports.cancel()
        stopping.cancel()


async def main(client, url, password, topic, subscriber, kind):
    options = dict(
        subscription_name=topic,
        subscriber_name=subscriber,
        shared=kind != "exclusive",
        auto_ack=False,
        auto_unsubscribe=kind != "member",
    )
    if client == "c8y_api":
        from c8y_tk.notification2 import AsyncListener

        c8y = c8y_api_client(url, password)
        await listen(lambda: AsyncListener(c8y, **options))
    else:
        from pyc8y.notification2 import Listener

        async with pyc8y_client(url, password) as c8y:
            await listen(lambda: Listener(c8y, **options))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
