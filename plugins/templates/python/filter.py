"""Passes the messages whose temperature is above a limit. Settings: {"limit": 20}."""

import json

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.exports.filtering import Interest
from wit_world.imports.types import BodyForm, MetaFields, State, Value_Number

# Every call has an object of its own: what outlives it stands here.
limit = None


class Filtering(exports.Filtering):
    def configure(self, settings):
        global limit
        try:
            limit = float(json.loads(settings)["limit"])
        except (ValueError, TypeError, KeyError):
            raise Err('settings must be like {"limit": 20}')
        # Say what you read, and no more: what isn't handed over costs nothing.
        return Interest(MetaFields(0), BodyForm.NONE, ["/c8y_Temperature/T/value"], State.NONE)

    def evaluate(self, batch):
        return [Ok(passes(message)) for message in batch]


def passes(message):
    # There is one value for each of the pointers.
    [temperature] = message.values
    return isinstance(temperature, Value_Number) and temperature.value > limit
