// Runs a user's function in QuickJS: messages by columns → verdicts, bodies.
//
// The text is compiled once, by `configure`. What it throws is a fault of that message alone.

import log from "tidegate:plugin/log@1.0.0";

/** Sources whose state is kept; the least recently seen one is forgotten first. */
const SOURCES = 10_000;

/** The compiled function, its settings if there are any yet, and its state by source if it takes a third parameter. */
let main, settings, states;
/** The message that is being looked at, and its time in milliseconds since 1970. */
let current, instant;

class Message {
  #body;
  #parsed;

  constructor(api, source, type, action, time, body) {
    this.api = api;
    this.source = source;
    this.type = type;
    this.action = action;
    this.time = time;
    this.#body = body;
  }

  /** Parsed when it is first read, and then always the same object. */
  get body() {
    if (this.#parsed === undefined) {
      if (this.#body == null) throw new TypeError("the body is no text");
      this.#parsed = JSON.parse(this.#body);
    }
    return this.#parsed;
  }

  toJSON() {
    return { ...this, body: this.body };
  }

  static hasReadBody(message) {
    return message.#parsed !== undefined;
  }
}

// -- Compiling

const STRICT = '"use strict"; ';
const DEFAULT = /^([ \t]*)export[ \t]+default\b/m;
const CONFIGURE = /^[ \t]*export(?=[ \t]+(?:(?:async[ \t]+)?function|const|let)[ \t]+configure\b)/m;
const COMMON = /^[ \t]*(?:module\.)?exports(?:\.\w+)?[ \t]*=(?![=>])/m;
const IMPORT = /^[ \t]*import\b|\brequire\b/;

/** The user's text starts on the third line of what `Function` makes of it, or behind `prefix`. */
const FIRST_LINE = 3;

/** The one function that the text is, or the one that it exports; and `configure`, if it exports that, too. */
function compile(text) {
  // A byte order mark.
  text = text.replace(/^\uFEFF/, "");
  if (text.trim() === "") throw `the script is empty; ${HINT}`;
  const exporting = DEFAULT.test(text);
  if (!exporting && COMMON.test(text)) throw "write `export default` in place of `module.exports =`";
  const configuring = exporting && CONFIGURE.test(text);
  const prefix = exporting ? STRICT : `${STRICT}exports.main = (`;
  // As long as what they replace, so that columns stay true.
  let body = exporting ? text.replace(DEFAULT, "$1exports.main =") : `${text.replace(/[;\s]+$/, "")}\n)`;
  if (configuring) body = `${body.replace(CONFIGURE, (found) => " ".repeat(found.length))}\nexports.configure = configure;`;
  const exports = {};
  columns = prefix.length;
  try {
    new Function("exports", prefix + body)(exports);
  } catch (error) {
    throw uncompiled(error, text, exporting);
  }
  if (typeof exports.main !== "function") throw `the script is no function; ${HINT}`;
  if (!isOrdinary(exports.main)) throw "the function must be an ordinary one: neither async nor a generator nor a class";
  if (hidesState(exports.main)) throw "a third parameter gets the state of the source only if none before or at it has a default value";
  if (configuring && !isOrdinary(exports.configure)) throw "`configure` must be an ordinary function";
  return exports;
}

const HINT = "write `(message, settings) => …`, or `export default` before the function if there is more than it";

/** Neither async nor a generator nor a class. */
function isOrdinary(value) {
  return value?.constructor === Function && !/^class\b/.test(value.toString());
}

/** Whether there is a third parameter that `length` does not count. */
function hidesState(main) {
  const [, parameters] = /^[^(]*\(([^)]*)/.exec(main.toString()) ?? ["", ""];
  return main.length < 3 && /=|\.\.\./.test(parameters) && parameters.split(",").length > 2;
}

/** What the author has to change. */
function uncompiled(error, text, exporting) {
  const lines = text.trimEnd().split("\n");
  const at = place(error);
  if (at && IMPORT.test(lines[at.line - 1])) return `${describe(error)}; nothing can be imported`;
  if (!(error instanceof SyntaxError)) return exporting ? describe(error) : `the script is no function: ${describe(error)}; ${HINT}`;
  const early = `SyntaxError: the script ends too early (line ${lines.length}, column ${lines.at(-1).length + 1})`;
  return `${at?.line > lines.length ? early : describe(error)}${exporting ? "" : `; ${HINT}`}`;
}

/** Columns that the first line of the user's text is moved by. */
let columns = 0;

/** Where in the user's text an exception was thrown, if the engine knows it. */
function place(error) {
  const found = /<input>:(\d+):(\d+)/.exec(error?.stack);
  if (found === null) return undefined;
  const line = found[1] - FIRST_LINE + 1;
  // Of some errors the engine knows no more than the line.
  return { line, column: Math.max(found[2] - (line === 1 ? columns : 0), 1) };
}

/** An exception as text. */
function describe(error) {
  try {
    if (!(error instanceof Error)) return `the script threw ${inspect(error)}`;
    const at = place(error);
    return `${error.name}: ${error.message}${at ? ` (line ${at.line}, column ${at.column})` : ""}`;
  } catch {
    return "the script threw something that has no text";
  }
}

// -- What a sandbox without a clock and a console offers

function inspect(value) {
  if (typeof value === "string") return value;
  if (value instanceof Error) return describe(value);
  try {
    return JSON.stringify(value) ?? String(value);
  } catch {
    return String(value);
  }
}

const writer = (level) => (...values) => log.write(level, values.map(inspect).join(" ").toWellFormed());

globalThis.console = {
  debug: writer("debug"),
  log: writer("info"),
  info: writer("info"),
  warn: writer("warn"),
  error: writer("error"),
};

const EngineDate = Date;

/** The time of the message stands for the time of the day. */
function now() {
  if (instant == null) throw new TypeError("there is no clock: now is the time of the message, which has none");
  return instant;
}

globalThis.Date = function Date(...args) {
  if (new.target === undefined) return new EngineDate(now()).toString();
  return Reflect.construct(EngineDate, args.length === 0 ? [now()] : args, new.target);
};
Object.defineProperties(Date, {
  prototype: { value: EngineDate.prototype, writable: false },
  length: { value: EngineDate.length },
  now: { value: now },
  parse: { value: EngineDate.parse },
  UTC: { value: EngineDate.UTC },
});
EngineDate.prototype.constructor = Date;
delete globalThis.performance;

// -- What the gateway asks

function stateOf(source) {
  const state = states.get(source) ?? {};
  // The map is in the order of insertion: what was seen last stands last.
  states.delete(source);
  states.set(source, state);
  if (states.size > SOURCES) states.delete(states.keys().next().value);
  return state;
}

/** Runs the function over the messages; `answer` gets what it returns, `fault` what it throws. */
function run({ apis, sources, types, actions, times, instants, bodies }, answer, fault) {
  for (let i = 0; i < apis.length; i++) {
    instant = instants[i];
    current = new Message(apis[i], sources[i], types[i], actions[i], times[i], bodies[i]);
    try {
      answer(states ? main(current, settings, stateOf(current.source)) : main(current, settings), i);
    } catch (error) {
      fault(describe(error).toWellFormed(), i);
    }
  }
}

const PASS = 1;
const FAULT = 2;

export const scripting = {
  configure(script, given) {
    const exported = compile(script);
    main = exported.main;
    if (main.length > 2) states = new Map();
    if (given !== undefined && given !== null) {
      settings = frozen(JSON.parse(given));
      accept(exported.configure);
    }
    return states !== undefined;
  },

  judge(batch) {
    const verdicts = new Uint8Array(batch.apis.length);
    const faults = [];
    const fault = (text, i) => {
      verdicts[i] = FAULT;
      faults.push(text);
    };
    run(batch, (returned, i) => { if (passes(returned)) verdicts[i] = PASS; }, fault);
    return { verdicts, faults };
  },

  shape(batch) {
    const bodies = [];
    run(batch, (body) => bodies.push(newBody(body)), (text) => bodies.push({ tag: "fault", val: text }));
    return bodies;
  },
};

/** What one message writes, the next ones would read. */
function frozen(value) {
  if (typeof value === "object" && value !== null) Object.values(Object.freeze(value)).forEach(frozen);
  return value;
}

/** Asks the script whether it can use the settings; what it throws is a text for the user who wrote them. */
function accept(configure) {
  try {
    configure?.(settings);
  } catch (error) {
    const text = error?.constructor === Error ? error.message : typeof error === "string" ? error : describe(error);
    throw text.toWellFormed();
  }
}

/** What a filter's function says. */
function passes(returned) {
  if (returned === undefined) throw new TypeError("the function returned nothing; a filter returns whether the message passes");
  refusePromise(returned);
  return Boolean(returned);
}

function newBody(returned) {
  if (returned === current && !Message.hasReadBody(current)) return { tag: "unchanged" };
  const body = returned === current ? current.body : returned;
  // A copy: it throws if the buffer was given away.
  if (body instanceof Uint8Array) return { tag: "bytes", val: body.slice() };
  refusePromise(body);
  const isBody = typeof body === "string" || (typeof body === "object" && body !== null);
  const text = typeof body === "string" ? body : isBody ? JSON.stringify(body) : undefined;
  if (text === undefined) {
    const what = body === undefined ? "nothing" : body === null ? "null" : `a ${typeof body}`;
    throw new TypeError(`the function returned ${what}; a transform returns an object, a text, a Uint8Array or the message`);
  }
  // Half a pair of surrogates has no form in UTF-8, and would cost the instance.
  return { tag: "text", val: text.toWellFormed() };
}

function refusePromise(returned) {
  if (returned instanceof Promise) throw new TypeError("the function returned a promise: it must not be async");
}
