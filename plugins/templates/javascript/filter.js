// Passes the messages whose temperature is above a limit. Settings: {"limit": 20}.

export default function (message, settings) {
  const temperature = message.body.c8y_Temperature?.T?.value;
  return temperature > settings.limit;
}
