// Passes the messages whose temperature is above a limit. Settings: {"limit": 20}.

#include "filter.h"
#include <stdlib.h>
#include <string.h>

typedef exports_tidegate_plugin_filtering_interest_t interest_t;
typedef exports_tidegate_plugin_filtering_message_t message_t;
typedef exports_tidegate_plugin_filtering_value_t value_t;
typedef exports_tidegate_plugin_filtering_list_message_t messages_t;
typedef exports_tidegate_plugin_filtering_list_result_bool_string_t verdicts_t;

static double limit;

// Reads the number behind `"name":`.
static bool read_number(const filter_string_t *json, const char *name, double *number) {
  const char *at = (const char *)json->ptr, *end = at + json->len;
  size_t length = strlen(name);
  while (at + length < end && memcmp(at, name, length) != 0) at++;
  if (at + length >= end) return false;
  at += length;
  while (at < end && (*at == ' ' || *at == ':')) at++;
  bool negative = at < end && *at == '-';
  if (negative) at++;
  if (at == end || *at < '0' || *at > '9') return false;
  double value = 0, place = 1;
  bool fraction = false;
  for (; at < end && ((*at >= '0' && *at <= '9') || (*at == '.' && !fraction)); at++) {
    if (*at == '.') {
      fraction = true;
    } else if (fraction) {
      value += (*at - '0') * (place /= 10);
    } else {
      value = value * 10 + (*at - '0');
    }
  }
  *number = negative ? -value : value;
  return true;
}

// True: `interest` is set. False: `error` is, which is a text for the user.
bool exports_tidegate_plugin_filtering_configure(filter_string_t *settings, interest_t *interest, filter_string_t *error) {
  bool found = read_number(settings, "\"limit\"", &limit);
  filter_string_free(settings);
  if (!found) {
    filter_string_dup(error, "the settings must be like {\"limit\": 20}");
    return false;
  }
  // Say what you read, and no more: what isn't handed over costs nothing.
  interest->meta = 0;
  interest->body = TIDEGATE_PLUGIN_TYPES_BODY_FORM_NONE;
  interest->state = TIDEGATE_PLUGIN_TYPES_STATE_NONE;
  interest->pointers.len = 1;
  interest->pointers.ptr = malloc(sizeof(filter_string_t));
  filter_string_dup(interest->pointers.ptr, "/c8y_Temperature/T/value");
  return true;
}

static bool passes(const message_t *message) {
  // There is one value for each of the pointers.
  const value_t *temperature = message->values.val.ptr;
  return temperature->tag == TIDEGATE_PLUGIN_TYPES_VALUE_NUMBER && temperature->val.number > limit;
}

void exports_tidegate_plugin_filtering_evaluate(messages_t *batch, verdicts_t *verdicts) {
  verdicts->len = batch->len;
  verdicts->ptr = malloc(batch->len * sizeof *verdicts->ptr);
  for (size_t i = 0; i < batch->len; i++) {
    verdicts->ptr[i].is_err = false;
    verdicts->ptr[i].val.ok = passes(&batch->ptr[i]);
  }
  exports_tidegate_plugin_filtering_list_message_free(batch);
}
