"""Completion of `python -m swarm...` in a shell: a script asks Hydra, or click, what may follow."""

BASH_SCRIPT = r"""_swarm_complete() {
    [[ -n "$ZSH_VERSION" ]] && setopt local_options bash_rematch ksh_arrays sh_word_split
    local line="${COMP_LINE:0:$COMP_POINT}" python="${COMP_WORDS[0]}" found word module rest
    local entry='^[^ ]+ +-m +swarm[. ]([a-z_]+) +(.*)$'
    COMPREPLY=()
    if [[ "$line" =~ ^[^[:space:]]+[[:space:]]+-m[[:space:]]+(swarm\.[[:alnum:]_.]*)$ ]]; then
        found=$(compgen -W "$("$python" -m swarm 2>/dev/null |
            sed -n 's/^  \([a-z_]*\)  .*/swarm.\1/p')" -- "${BASH_REMATCH[1]}")
    elif [[ "$line" =~ $entry ]]; then
        module="swarm.${BASH_REMATCH[1]}" rest="${BASH_REMATCH[2]}"
        case "$module" in
        swarm.search|swarm.evaluate|swarm.finetune|swarm.sweep|swarm.compare_methods)
            [[ "$module" == *sweep || "$module" == *methods ]] && module=swarm.search
            found=$(COMP_LINE="$module $rest" "$python" -m "$module" -sc query=bash 2>/dev/null) ;;
        swarm.consortium|swarm.ui)
            local words=($rest) variable=$(tr a-z A-Z <<< "$module")
            [[ -z "$rest" || "$rest" == *[[:space:]] ]] && words+=("")
            found=$(env "_${variable//./_}_COMPLETE=bash_complete" COMP_WORDS="$module $rest" \
                COMP_CWORD=${#words[@]} "$python" -m "$module" 2>/dev/null |
                sed -n 's/^plain,//p') ;;
        esac
    fi
    word="${line##*[[:space:]]}"
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    # Where "=" ends a word, only what follows it is wanted.
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
}
complete -o nospace -o default -F _swarm_complete python python3
"""

ZSH_SCRIPT = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" + BASH_SCRIPT

FISH_SCRIPT = r"""function _swarm_complete
    set -l line (commandline -pc)
    set -l parts (string match -r '^(\S+)\s+-m\s+swarm[.\s]([a-z_]+)\s+(.*)$' -- $line)
    test (count $parts) -eq 4; or return
    set -l module $parts[3]
    switch $module
        case search evaluate finetune sweep compare_methods
            contains $module sweep compare_methods; and set module search
            set -lx COMP_LINE "swarm.$module $parts[4]"
            $parts[2] -m swarm.$module -sc query=fish 2>/dev/null
    end
end
complete -c python -c python3 -a '(_swarm_complete)'
"""

COMPLETION_SCRIPTS = {"bash": BASH_SCRIPT, "zsh": ZSH_SCRIPT, "fish": FISH_SCRIPT}
"""What `python -m swarm --completion SHELL` prints."""
