#!/usr/bin/env bash
# Builds ../components/script-runner.wasm and renews its line in DIGESTS. Needs Node.js and npm.
set -euo pipefail

# It brings QuickJS along.
readonly componentize_qjs=componentize-qjs@0.4.5

cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/wit/deps"
cp runner.wit "$work/wit/"
cp ../../wit/plugin.wit "$work/wit/deps/"
npm install --prefix "$work" --ignore-scripts --no-audit --no-fund --silent "$componentize_qjs"
"$work/node_modules/.bin/componentize-qjs" --wit "$work/wit" --world script-runner --js runner.js \
  --sync --stub-wasi --minify --output ../components/script-runner.wasm

cd ../components
digest=$(sha256sum script-runner.wasm)
sed -i "s/^.*  script-runner.wasm$/$digest/" DIGESTS
