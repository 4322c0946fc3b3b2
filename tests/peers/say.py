"""What the scripts tell the test: one JSON object a line."""

import json


def say(event, **members):
    print(json.dumps({"event": event, **members}), flush=True)


def found(what, value):
    """Something that the gateway has answered."""
    say("found", what=what, value=value)
