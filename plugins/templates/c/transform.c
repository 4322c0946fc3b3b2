// Adds a member `site` to the bodies. Settings: {"site": "Lyon"}.

#include "transform.h"
#include <stdlib.h>
#include <string.h>

typedef exports_tidegate_plugin_transforming_interest_t interest_t;
typedef exports_tidegate_plugin_transforming_message_t message_t;
typedef exports_tidegate_plugin_transforming_list_message_t messages_t;
typedef exports_tidegate_plugin_transforming_result_new_body_string_t result_t;
typedef exports_tidegate_plugin_transforming_list_result_new_body_string_t results_t;

// What is put in after the opening brace of a body: `"site":"Lyon"`.
static char member[256] = "\"site\":";
static size_t member_length = 7;

// Takes over the string behind `"site":`, with its quotes and escapes.
static bool read_site(const transform_string_t *json) {
  const char *at = (const char *)json->ptr, *end = at + json->len;
  while (at + 6 < end && memcmp(at, "\"site\"", 6) != 0) at++;
  if (at + 6 >= end) return false;
  at += 6;
  while (at < end && (*at == ' ' || *at == ':')) at++;
  if (at == end || *at != '"') return false;
  const char *start = at++;
  while (at < end && *at != '"') at += *at == '\\' ? 2 : 1;
  size_t length = at + 1 - start;
  if (at >= end || member_length + length > sizeof member) return false;
  memcpy(member + member_length, start, length);
  member_length += length;
  return true;
}

// True: `interest` is set. False: `error` is, which is a text for the user.
bool exports_tidegate_plugin_transforming_configure(transform_string_t *settings, interest_t *interest, transform_string_t *error) {
  bool found = read_site(settings);
  transform_string_free(settings);
  if (!found) {
    transform_string_dup(error, "the settings must be like {\"site\": \"Lyon\"}, with a site of at most 200 bytes");
    return false;
  }
  // Say what you read, and no more: what isn't handed over costs nothing.
  interest->meta = 0;
  interest->body = TIDEGATE_PLUGIN_TYPES_BODY_FORM_BYTES;
  interest->state = TIDEGATE_PLUGIN_TYPES_STATE_NONE;
  return true;
}

static void reshape(const message_t *message, result_t *result) {
  const uint8_t *body = message->body.val.bytes.ptr;
  size_t length = message->body.val.bytes.len;
  if (length < 2 || body[0] != '{') {
    // A fault of this message alone.
    result->is_err = true;
    transform_string_dup(&result->val.err, "the body is no object");
    return;
  }
  bool empty = body[1] == '}';
  uint8_t *new_body = malloc(length + member_length + !empty), *at = new_body;
  *at++ = '{';
  memcpy(at, member, member_length);
  at += member_length;
  if (!empty) *at++ = ',';
  memcpy(at, body + 1, length - 1);
  result->is_err = false;
  result->val.ok.tag = EXPORTS_TIDEGATE_PLUGIN_TRANSFORMING_NEW_BODY_BYTES;
  result->val.ok.val.bytes.ptr = new_body;
  result->val.ok.val.bytes.len = length + member_length + !empty;
}

void exports_tidegate_plugin_transforming_apply(messages_t *batch, results_t *results) {
  results->len = batch->len;
  results->ptr = malloc(batch->len * sizeof *results->ptr);
  for (size_t i = 0; i < batch->len; i++) reshape(&batch->ptr[i], &results->ptr[i]);
  exports_tidegate_plugin_transforming_list_message_free(batch);
}
