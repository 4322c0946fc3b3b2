// Adds a member `site` to the bodies. Settings: {"site": "Lyon"}.

export default function (message, settings) {
  return { ...message.body, site: settings.site };
}
