#!/usr/bin/env bash
# Builds the components from source.
#
#   build.sh            rewrites components/ with its DIGESTS, and the bindings in templates/c
#   build.sh --check    changes nothing there, but compares it with what was built
#   build.sh --install  first installs what a machine without rustup's target needs; goes with both
#
# See README.md beside this file.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
readonly root=$PWD
readonly components=$root/components
readonly target=wasm32-unknown-unknown
readonly target_dir=${CARGO_TARGET_DIR:-$root/target}
readonly modules=$target_dir/$target/release
readonly tools=$target_dir/debug
readonly bindings=templates/c/bindings

readonly guests=(
  type-filter fragments-to-copy
  threshold deadband rate-limit sampling geofence unit-conversion
)
# Built by script-runner/build.sh, never to the same bytes: carried over as it is.
readonly carried=script-runner.wasm
readonly faulty=(loop loop-start keeper memory wrong-length trap-third garbage huge shape-trap-third first-alone pointers)

# Debian's compiler for browsers: goes beside rustup, and brings the source of std instead of a built one.
readonly debian_rustc=/usr/bin/rustc
readonly debian_linker=wasm-ld-22
readonly debian_source=/usr/lib/rustlib/src/rust

fail() {
  echo "build.sh: $*" >&2
  exit 1
}

# Without the recommended packages, no second cargo comes along.
install_debian() {
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends rustc-web rust-web-src rust-web-llvm lld-22
}

# Sets `environment` and `flags` for cargo, and `toolchain`: what the bytes depend on beside the sources.
choose_toolchain() {
  local rustc linker sources
  environment=()
  flags=(--locked --quiet --release --target "$target")
  if [[ -x $debian_rustc && -d $debian_source ]] && command -v "$debian_linker" >/dev/null; then
    rustc=$debian_rustc
    sources=$debian_source
    linker=$("$debian_linker" --version)
    # Without RUSTC_BOOTSTRAP, a stable cargo takes no -Z.
    environment+=("RUSTC=$rustc" RUSTC_BOOTSTRAP=1 "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$debian_linker")
    flags+=(-Zbuild-std=std,panic_abort)
  elif [[ -d $(rustc --print sysroot)/lib/rustlib/$target ]]; then
    rustc=rustc
    sources=$(rustc --print sysroot)/lib/rustlib/src/rust
    linker="the compiler's own"
  else
    fail "no compiler for $target: 'rustup target add $target' or 'plugins/build.sh --install' gets one"
  fi
  toolchain=$(
    "$rustc" -vV | grep -E '^(rustc |commit-hash:|release:|LLVM version:)'
    echo "linker: $linker"
  )
  environment+=("CARGO_ENCODED_RUSTFLAGS=$(remaps "$sources")")
}

# Panic messages hold paths of sources: the flags that make them the same on every machine.
# $1: the sources of the compiler
remaps() {
  local registry
  printf -- '--remap-path-prefix=%s=/rust\x1f--remap-path-prefix=%s=/plugins' "$1" "$root"
  for registry in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
    printf -- '\x1f--remap-path-prefix=%s=/registry' "$registry"
  done
}

# $1: folder for the components
build() {
  local guest
  mkdir -p "$1/faulty"
  for guest in "${guests[@]}"; do
    env "${environment[@]}" cargo rustc "${flags[@]}" --package "$guest" --crate-type cdylib
    "$tools/componentize" "$modules/${guest//-/_}.wasm" "$1/$guest.wasm"
  done
  env "${environment[@]}" cargo build "${flags[@]}" --package faulty --examples
  for guest in "${faulty[@]}"; do
    "$tools/componentize" "$modules/examples/${guest//-/_}.wasm" "$1/faulty/$guest.wasm"
  done
  cp "$components/$carried" "$1/"
}

# $1: folder for the bindings of the template for C
bind() {
  local world
  mkdir -p "$1"
  for world in filter transform; do
    "$tools/c-bindings" ../wit "$world" "$1"
  done
}

# $1: folder with components
digests() {
  (cd "$1" && find . -name '*.wasm' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum)
}

# The toolchain stands in comments, so that sha256sum can check the file.
write_digests() {
  sed 's/^/# /' <<<"$toolchain"
  digests "$components"
}

recorded_toolchain() {
  sed -n 's/^# //p' "$components/DIGESTS"
}

recorded_digests() {
  sed '/^#/d' "$components/DIGESTS"
}

# The gateway's tests of the built-in plugins take the components from this folder.
# $1: folder with components
run_vectors() {
  local report
  report=$(TIDEGATE_COMPONENTS=$1 cargo test --manifest-path "$root/../Cargo.toml" --package tidegate --lib its_vectors) &&
    [[ $report == *"test result: ok. 4 passed"* ]] || fail "$1 does not meet the vectors: $report"
}

# $1: folder with what was built
check() {
  if [[ $toolchain == "$(recorded_toolchain)" ]]; then
    diff <(recorded_digests) <(digests "$1") || fail "what was built differs from components/"
    echo "components/ is what its sources build, byte for byte"
  else
    diff <(recorded_toolchain) - <<<"$toolchain" || true
    diff <(recorded_digests) <(digests "$1") || true
    run_vectors "$components"
    run_vectors "$1"
    echo "another toolchain than the recorded one: the components above differ, both meet the vectors"
  fi
}

main() {
  local checking=false argument
  for argument in "$@"; do
    case $argument in
      --check) checking=true ;;
      --install) install_debian ;;
      *) fail "unknown argument $argument" ;;
    esac
  done
  if $checking; then
    diff <(recorded_digests) <(digests "$components") || fail "components/ is not what its DIGESTS say"
  fi

  # Unpacks the sources of the dependencies, whose folder the flags name.
  cargo fetch --locked --quiet
  choose_toolchain
  cargo build --locked --quiet --package componentize
  local built=$target_dir/components bound=$target_dir/bindings
  rm -rf "$built" "$bound"
  bind "$bound"
  if $checking; then
    diff -r "$bindings" "$bound" || fail "$bindings is not what ../wit gives"
  fi
  build "$built"
  if $checking; then
    check "$built"
  else
    rm -rf "$components" "$bindings"
    cp -r "$built" "$components"
    cp -r "$bound" "$bindings"
    write_digests >"$components.new"
    mv "$components.new" "$components/DIGESTS"
  fi
}

main "$@"
