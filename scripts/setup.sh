#!/usr/bin/env bash
# Makes .venv from uv.lock with all that it needs from outside: uv, Python, Java 17 or 21, g++.
#   scripts/setup.sh demo    what `make demo` runs: no torch, no Airflow, no test tools
#   scripts/setup.sh gpu     TensorFlow with CUDA in place of its CPU build, PyTorch; Horovod with NCCL: docs/training/speed.md
#   scripts/setup.sh all     everything but that
#   scripts/setup.sh release no environment: what `make release` needs, of which it prints the path of uv
# With 3.12 or 3.13 behind it, .venv-3.12 or .venv-3.13 from the other half of uv.lock: the newest of everything, on that
# Python, without Horovod and Petastorm.
# A second call compares one hash and returns. What cannot be installed here ends with the one command to run; the
# optional native kernel alone is left out instead.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-all}
python=${2:-}
usage() { echo "usage: scripts/setup.sh demo|gpu|all [3.12|3.13], or release" >&2; exit 2; }
case $python in "" | 3.12 | 3.13) ;; *) usage ;; esac
venv=.venv${python:+-$python}
case $profile in
  demo) holds=(demo gpu all); extras=(--no-dev --extra spark --extra tensorflow --extra horovod --extra demo) ;;
  gpu) holds=(gpu); extras=(--no-dev --extra spark --extra gpu --group horovod-gpu --extra torch --extra s3 --extra hdfs --extra demo) ;;
  all) holds=(all); extras=(--extra all --group docs) ;;
  release) holds=() ;;
  *) usage ;;
esac

fingerprint=$(cat uv.lock pyproject.toml .python-version native/*.[ch] native/setup.py native/pyproject.toml "$0" | sha256sum | cut -c1-64)
for done_profile in "${holds[@]}"; do
  if [[ -f $venv/setup-$done_profile && $(cat "$venv/setup-$done_profile") == "$fingerprint" ]]; then
    exit 0
  fi
done

say() { echo "setup: $*" >&2; }
stop() { echo "setup: $1" >&2; echo "run:   $2" >&2; exit 1; }

# Debian package $1, where we are root on a system with apt; else the one command that installs it.
install_package() {
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing $1"
    apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >&2 \
      || stop "$1 could not be installed" "apt-get install -y $1"
  elif command -v dnf >/dev/null; then
    stop "$2 is missing" "sudo dnf install -y $3"
  else
    stop "$2 is missing" "sudo apt-get update && sudo apt-get install -y $1"
  fi
}

find_uv() {
  local own=${XDG_CACHE_HOME:-$HOME/.cache}/shardmill/uv
  # A shim of pyenv may be there and lead nowhere, so each candidate must answer.
  for candidate in uv "$own/bin/uv" "$HOME/.local/bin/uv"; do
    if "$candidate" --version >/dev/null 2>&1; then echo "$candidate"; return; fi
  done
  say "installing uv from PyPI into $own"
  if python3 -m venv "$own" >&2 && "$own/bin/pip" install --quiet uv >&2; then echo "$own/bin/uv"; return; fi
  if python3 -m pip install --quiet --user uv >&2; then echo "$HOME/.local/bin/uv"; return; fi
  stop "uv is missing and neither venv nor pip could install it" "sudo apt-get install -y python3-venv && make $profile"
}

java_major() { "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\)[."].*/\1/p' | head -1; }

# Prints the home of a Java that Spark 4 runs on.
find_java() {
  local on_path
  on_path=$(command -v java || true)
  for java in "${JAVA_HOME:-/nowhere}/bin/java" "$on_path" /usr/lib/jvm/*/bin/java; do
    [[ -n $java && -x $java ]] || continue
    case $(java_major "$java") in 17 | 21) dirname "$(dirname "$(readlink -f "$java")")"; return ;; esac
  done
}

has_jpeg_headers() { printf '#include <stdio.h>\n#include <jpeglib.h>\n' | cc -E - >/dev/null 2>&1; }

# native/: everything works without it, so nothing here ends the script.
build_native_kernel() {
  if ! has_jpeg_headers && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing libjpeg-dev"
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libjpeg-dev) >&2 || true
  fi
  if ! has_jpeg_headers; then
    say "no native kernel: jpeglib.h is missing (Debian: libjpeg-dev, Fedora: libjpeg-turbo-devel); all works without it"
  elif ! "$uv" pip install --quiet --python "$venv" --no-deps --no-build-isolation ./native; then
    say "no native kernel: it could not be built, see above; all works without it"
  fi
}

uv=$(find_uv)
if [[ $profile == release ]]; then
  command -v cc >/dev/null || install_package gcc "a C compiler" gcc
  has_jpeg_headers || install_package libjpeg-dev jpeglib.h libjpeg-turbo-devel
  echo "$uv"
  exit 0
fi

java_home=$(find_java)
if [[ -z $java_home ]]; then
  install_package openjdk-17-jre-headless "Java 17 or 21" java-17-openjdk-headless
  java_home=$(find_java)
  [[ -n $java_home ]] || stop "no Java 17 or 21 after installing it" "java -version"
fi

if [[ -z $python ]]; then
  command -v g++ >/dev/null || install_package g++ "g++, which builds Horovod," gcc-c++
  say "installing the locked packages into .venv (Horovod is built from source the first time: some minutes)"
else
  say "installing the locked packages into $venv"
  # uv asks the PATH for interpreters, where pyenv names its default one only.
  PATH=$PATH$(printf ':%s' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$python".*/bin)
fi
# Between the two builds of TensorFlow all that the other one brought has to go; else what a user added may stay.
keep=--inexact
if [[ $profile == gpu || -f $venv/setup-gpu ]]; then keep=; fi
# An empty mark is no finished set-up, and tells the next call of one that was interrupted.
if [[ -d $venv ]]; then
  for mark in "$venv"/setup-* "$venv/setup-$profile"; do [[ $mark == *'*' ]] || : > "$mark"; done
fi
# Where no process may keep what it compiles, each would compile all that it imports: of TensorFlow, eight seconds.
compile=
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then compile=--compile-bytecode; fi
UV_PROJECT_ENVIRONMENT=$venv "$uv" sync --frozen ${python:+--python "$python"} $keep $compile "${extras[@]}"
find "$venv" -maxdepth 1 -name 'setup-*' ! -name "setup-$profile" -delete
# For what a user adds; nothing of ours needs it.
"$uv" pip install --quiet --python "$venv" pip || say "no pip in $venv: it could not be fetched"
build_native_kernel

# Spark takes JAVA_HOME before PATH: recipes of the Makefile source this.
echo "export JAVA_HOME='$java_home'" > "$venv/shardmill.env"
echo "$fingerprint" > "$venv/setup-$profile"
say "done"
