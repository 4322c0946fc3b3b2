//! The command line of Tidegate.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tidegate::admin::{NobodyReads, TenantArgs, UserArgs};
use tidegate::authoring::PluginArgs;
use tidegate::demo::DemoArgs;
use tidegate::listen::ListenArgs;
use tidegate::manage::{ConsumersArgs, SubscriptionsArgs, TopicsArgs};
use tidegate::plugin::compiler;
use tidegate::serve::ServeArgs;
use tidegate::upkeep::{BackupArgs, CheckArgs};

/// Bodies are allocated on one thread and freed on another, which this allocator takes lightly.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a shell says of programs that end when nobody reads them any more: 128 and the number of the signal.
const ENDED_BY_SIGPIPE: u8 = 141;

/// A gateway for the edge: devices in over HTTP, filtered by sandboxed plugins, kept until each consumer has acknowledged.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the gateway (what happens without a command, too).
    Serve(ServeArgs),
    /// Consumes a topic and prints its messages.
    Listen(ListenArgs),
    /// Shows in a minute what it is about: a gateway of its own, simulated devices, consumers, and a kill -9 in the middle.
    Demo(DemoArgs),
    /// Adds, removes and lists users, and sets their passwords.
    User(UserArgs),
    /// Adds, removes and lists tenants.
    Tenant(TenantArgs),
    /// Shows how topics fare, and changes what is set for them.
    Topics(TopicsArgs),
    /// Lists the subscriptions with the plugins that they name.
    Subscriptions(SubscriptionsArgs),
    /// Shows what waits for consumers, and unsubscribes them.
    Consumers(ConsumersArgs),
    /// Begins, tries, uploads, shows, rolls out, downloads and deletes plugins.
    Plugin(PluginArgs),
    /// Makes a consistent copy of the database, of a running gateway or of one that is stopped.
    Backup(BackupArgs),
    /// Checks a database: that SQLite's structures are whole, and that what is in it fits together.
    Check(CheckArgs),
    /// Compiles a plugin from standard input to standard output, within limits. The gateway calls this itself.
    #[command(name = compiler::COMMAND, hide = true)]
    CompilePlugin(compiler::ChildArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        // Without threads that could meet the child's limits.
        Some(Command::CompilePlugin(args)) => compiler::run_child(&args).map_err(anyhow::Error::msg),
        None => run(tidegate::serve::run(ServeArgs::default())),
        Some(Command::Serve(args)) => run(tidegate::serve::run(args)),
        Some(Command::Listen(args)) => run(tidegate::listen::run(args)),
        Some(Command::Demo(args)) => run(tidegate::demo::run(args)),
        Some(Command::User(args)) => run(tidegate::admin::users(args)),
        Some(Command::Tenant(args)) => run(tidegate::admin::tenants(args)),
        Some(Command::Topics(args)) => run(tidegate::manage::topics(args)),
        Some(Command::Subscriptions(args)) => run(tidegate::manage::subscriptions(args)),
        Some(Command::Consumers(args)) => run(tidegate::manage::consumers(args)),
        Some(Command::Plugin(args)) => run(tidegate::authoring::run(args)),
        Some(Command::Backup(args)) => run(tidegate::upkeep::backup(args)),
        Some(Command::Check(args)) => run(tidegate::upkeep::check(args)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<NobodyReads>() => ExitCode::from(ENDED_BY_SIGPIPE),
        Err(error) => {
            use std::io::Write as _;
            // With stderr gone there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "tidegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(command);
    // A thread that waits for a file for ever must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}
