#!/usr/bin/env bash
# make install and make uninstall.
#
#     deploy/install.sh install|uninstall
#
# From the environment, all of it set by make:
#   DESTDIR     put before every path that is written; nothing that is installed contains it
#   PREFIX      /usr/local: programs, units, manual pages. SYSCONFDIR  /etc: configuration
#   PYTHON      with pip 23 or later; what it is made of runs the daemon
#   WHEELS      folder with the wheel of this package and of everything it needs; nothing is fetched
#   GATEWAY     the gateway; left out with its unit and configuration if there is no such file
#
# What is put where stands in PREFIX/lib/colibri/manifest, in order, a line each; uninstall goes by that alone:
#   d PATH          a folder that was not there before; removed if nothing else has come into it
#   f PATH          a file or link
#   c PATH SHA256   a configuration file, never written over; removed if it is still what was installed
# PREFIX/lib/colibri itself is a Python environment of its own; nothing else belongs in there.
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."

tree=$PREFIX/lib/colibri
programs=(colibrid colibri-client colibri-bench)
entries=() # of the new manifest

die() {
    echo "install: $*" >&2
    exit 1
}

# ---- putting things in place -------------------------------------------------------------------------------------

folder() { # PATH
    [[ -d $DESTDIR$1 ]] && return
    folder "$(dirname "$1")"
    mkdir "$DESTDIR$1"
    entries+=("d $1")
}

file() { # MODE SOURCE PATH; a text has PREFIX where the source has /usr/local
    folder "$(dirname "$3")"
    rm -f "$DESTDIR$3"
    if grep -qI . "$2"; then
        sed "s|/usr/local|$PREFIX|g" "$2" >"$DESTDIR$3"
    else
        cp "$2" "$DESTDIR$3"
    fi
    chmod "$1" "$DESTDIR$3"
    entries+=("f $3")
}

configuration() { # SOURCE PATH
    [[ -e $DESTDIR$2 ]] && return # its line of the old manifest stays
    file 644 "$1" "$2"
    unset 'entries[-1]'
    entries+=("c $2 $(sha256 "$DESTDIR$2")")
}

sha256() { sha256sum <"$1" | cut -d' ' -f1; }

# The environment is made beside the old one, told where it will be, and takes its place by rename: scripts of the old
# one work until then.
staged=$DESTDIR$PREFIX/lib/.colibri.new
environment() {
    rm -rf "$staged"
    "$PYTHON" -m venv --without-pip "$staged"
    "$PYTHON" -m pip --python "$staged/bin/python" install --quiet --no-index --find-links "$WHEELS" --no-compile \
        --root-user-action=ignore 'colibri-daemon[demo]'
    rm -f "$staged"/bin/[Aa]ctivate*
}

relocate() {
    grep -rlIF -- "$staged" "$staged" | xargs -r sed -i "s|$staged|$tree|g"
    "$staged/bin/python" -m compileall -q -j 0 -s "$staged" -p "$tree" "$staged/lib"
}

pages() { # manual pages and completion scripts, which the programs themselves tell
    local page program shell target name
    mkdir "$staged/pages"
    PATH=$staged/bin:$PATH "$staged/bin/python" deploy/man.py "$staged/pages" "${programs[@]}" ${GATEWAY:+"$GATEWAY"}
    for page in "$staged"/pages/*.1; do
        file 644 "$page" "$PREFIX/share/man/man1/${page##*/}"
    done
    for program in colibrid colibri-client; do
        for shell in bash zsh fish; do
            "$staged/bin/$program" completion "$shell" >"$staged/pages/script"
            name=$program
            case $shell in
            bash) target=bash-completion/completions ;;
            zsh) target=zsh/site-functions name=_$program ;;
            fish) target=fish/vendor_completions.d name=$program.fish ;;
            esac
            file 644 "$staged/pages/script" "$PREFIX/share/$target/$name"
        done
    done
    rm -r "$staged/pages"
}

install_all() {
    local units=(colibri.service colibri.socket) unit program path old=()
    [[ -e ${GATEWAY:-} ]] || GATEWAY=
    compgen -G "$WHEELS/colibri_daemon-*.whl" >/dev/null || die "$WHEELS: there is no wheel; run make wheel first"
    [[ ! -e $DESTDIR$tree || -e $DESTDIR$tree/manifest ]] || die "$DESTDIR$tree is there and not ours"
    [[ ! -e $DESTDIR$tree ]] || mapfile -t old <"$DESTDIR$tree/manifest"

    mkdir -p "$DESTDIR/"
    folder "$PREFIX/lib"
    environment
    pages
    for program in "${programs[@]}"; do
        folder "$PREFIX/bin"
        ln -sfn "../lib/colibri/bin/$program" "$DESTDIR$PREFIX/bin/$program"
        entries+=("f $PREFIX/bin/$program")
    done
    folder "$SYSCONFDIR/colibri"
    configuration deploy/colibrid.toml "$SYSCONFDIR/colibri/colibrid.toml"
    if [[ $GATEWAY ]]; then
        units+=(colibri-gateway.service)
        file 755 "$GATEWAY" "$PREFIX/bin/colibri-gateway"
        configuration deploy/colibri-gateway.toml "$SYSCONFDIR/colibri/colibri-gateway.toml"
    fi
    for unit in "${units[@]}"; do
        file 644 "deploy/systemd/$unit" "$PREFIX/lib/systemd/system/$unit"
    done
    file 644 deploy/systemd/sysusers.conf "$PREFIX/lib/sysusers.d/colibri.conf"
    file 644 deploy/systemd/tmpfiles.conf "$PREFIX/lib/tmpfiles.d/colibri.conf"
    for unit in newer-systemd.conf metrics-on-loopback.conf; do
        file 644 "deploy/systemd/$unit" "$PREFIX/share/colibri/$unit"
    done
    file 644 deploy/README.md "$PREFIX/share/doc/colibri/README.md"
    file 644 deploy/RUNBOOK.md "$PREFIX/share/doc/colibri/RUNBOOK.md"
    file 644 deploy/GATEWAY.md "$PREFIX/share/doc/colibri/GATEWAY.md"
    for path in deploy/prometheus/*.yml deploy/grafana/*.json; do
        file 644 "$path" "$PREFIX/share/colibri/${path#deploy/}"
    done
    relocate
    take_over
    echo "installed under $DESTDIR$PREFIX; configuration: $DESTDIR$SYSCONFDIR/colibri"
}

# What the old version had and this one has not goes; folders and configuration that were ours before are still ours.
take_over() {
    local line kept=() new
    new=$(printf '%s\n' "${entries[@]}")
    for line in "${old[@]}"; do
        case $line in
        f*) grep -qxF -- "$line" <<<"$new" || rm -f "$DESTDIR${line#f }" ;;
        *) grep -qxF -- "$line" <<<"$new" || kept+=("$line") ;;
        esac
    done
    printf '%s\n' "${kept[@]}" "${entries[@]}" | sed '/^$/d' >"$staged/manifest"
    rm -rf "$DESTDIR$tree.old"
    [[ ! -e $DESTDIR$tree ]] || mv "$DESTDIR$tree" "$DESTDIR$tree.old"
    mv "$staged" "$DESTDIR$tree"
    rm -rf "$DESTDIR$tree.old"
}

# ---- taking them away --------------------------------------------------------------------------------------------

uninstall_all() {
    local lines=() kind path sum i
    [[ -e $DESTDIR$tree/manifest ]] || die "$DESTDIR$tree/manifest: not there; nothing is installed under this PREFIX"
    mapfile -t lines <"$DESTDIR$tree/manifest"
    rm -rf "$DESTDIR$tree"
    for ((i = ${#lines[@]} - 1; i >= 0; i--)); do
        read -r kind path sum <<<"${lines[i]}"
        path=$DESTDIR$path
        case $kind in
        f) rm -f "$path" ;;
        d) rmdir --ignore-fail-on-non-empty "$path" 2>/dev/null || true ;; # gone already, or with files of others in it
        c)
            if [[ -e $path && $(sha256 "$path") != "$sum" ]]; then
                echo "kept, since it was changed: $path"
            else
                rm -f "$path"
            fi
            ;;
        esac
    done
}

case ${1-} in
install) install_all ;;
uninstall) uninstall_all ;;
*) die "usage: deploy/install.sh install|uninstall" ;;
esac
